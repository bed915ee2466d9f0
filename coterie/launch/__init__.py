"""Starting and watching of services: a whole federation on one machine, and one party's part of a larger one."""
