"""Pipeline schedules as data: who does what in which order, checked, simulated and weighed before any rank starts."""
