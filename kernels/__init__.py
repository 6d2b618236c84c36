"""The operations that engine and trainer share: one signature each, a torch reference first."""
