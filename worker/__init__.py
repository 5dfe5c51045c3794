"""One model's process: loads it, serves it on a UNIX socket, dies with its parent. Starts in `main`."""
