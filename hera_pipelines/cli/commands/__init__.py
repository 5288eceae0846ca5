"""One module per `tiphys` command."""
