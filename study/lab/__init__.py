"""Several machines on one: network namespaces, joined by a network of a chosen rate. Linux, root."""
