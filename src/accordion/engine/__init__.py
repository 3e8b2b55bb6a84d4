"""The sharding engine; read autograd, unit, collectives, layout, in this order."""
