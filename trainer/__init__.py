"""The training side: a verl plugin with the packed training model, its FSDP2 engine and the objective."""
