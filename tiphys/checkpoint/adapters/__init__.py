"""One module for each framework. Each needs that framework, so none is imported from here."""
