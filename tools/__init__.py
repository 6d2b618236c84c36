"""Tools around the repository; nothing of samebits imports them."""
