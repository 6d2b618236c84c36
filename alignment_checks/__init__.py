"""Checks that trainer and serving engine agree, each of which fails closed and names what differs."""
