"""What a training step takes, known before launch; read api, search, predict, trace, in this order."""
