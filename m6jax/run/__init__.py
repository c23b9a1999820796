"""The training loop and the other modes of the command line."""
