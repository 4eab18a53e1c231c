"""The type checker that jaxtyping applies to the package while tests run."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int will do where a float is wanted (PEP 484)
