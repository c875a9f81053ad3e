"""The wrappers: what carries out plans in a training, by torch's reducer or by flat buckets.

``ddp``, ``sharded`` and ``bsp`` are what users wrap models with. What they are put together from is
in packages of which the left may import the right: ``reducer`` and ``flat`` (how gradients and
parameters travel), ``reporting`` (what a wrapper tells of its training), ``driving`` (planning,
carried out on one rank of many), ``wrapping`` (what is settled before the first step).
"""
