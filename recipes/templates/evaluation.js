const openAll = document.getElementById("open-all");
openAll.hidden = false;
openAll.addEventListener("click", () => {
  const open = openAll.textContent === "Open all";
  for (const item of document.querySelectorAll("details")) item.open = open;
  openAll.textContent = open ? "Close all" : "Open all";
});
