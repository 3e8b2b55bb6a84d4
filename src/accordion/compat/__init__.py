"""Programs written for other libraries keep their code: translations onto the engine, one import away."""
