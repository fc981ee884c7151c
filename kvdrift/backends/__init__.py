"""How a model object is driven: forward passes with or without a cache; never what a site, path or measurement is."""
