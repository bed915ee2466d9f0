"""Run data owners: they take sealed interactions, form blocks of them and compute gradients of item factors."""
