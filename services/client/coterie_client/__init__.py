"""Run client hosts, which keep users' histories, take part in training and answer users' applications."""
