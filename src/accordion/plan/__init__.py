"""Memory and time of a training step, before launch; read api, search, predict, trace, in this order."""
