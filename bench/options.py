"""Types of the options that are numbers. argparse names the option whose text is refused."""

import argparse
import math


def integer(text, least=1):
    """An integer of at least `least`."""
    try:
        if (number := int(text)) >= least:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: must be an integer of at least {least}")


def integers(text, least=1):
    """Integers of at least `least` with commas between them."""
    return [integer(part, least) for part in text.split(",")]


def amount(text):
    """A finite number of at least 0."""
    try:
        if 0 <= (number := float(text)) < math.inf:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: must be a finite number of at least 0")


def amounts(text):
    """Finite numbers of at least 0 with commas between them."""
    return [amount(part) for part in text.split(",")]
