"""For all tests: random inputs are generated at whatever speed a busy machine has."""

from hypothesis import HealthCheck, settings

settings.register_profile("pagoda", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pagoda")
