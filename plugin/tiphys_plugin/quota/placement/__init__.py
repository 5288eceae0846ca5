"""Places requests on nodes: best fit or least fragmentation, gangs all or nothing, by topology."""
