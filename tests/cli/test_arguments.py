"""Help and refusals common to all subcommands."""

import re

import pytest

from conftest import nsa, refused


def subcommands():
    text = nsa("--help").stdout.decode().split("Subcommands:")[1]
    return re.findall(r"^  (\w+)", text, re.MULTILINE)


def test_train_and_generate_are_there():
    assert {"train", "generate"} <= set(subcommands())


@pytest.mark.parametrize("name", subcommands())
def test_every_subcommand_has_help(name):
    text = nsa(name, "--help").stdout.decode()
    assert "Usage: nsa" in text
    for line in re.findall(r"^  -.*", text, re.MULTILINE):
        assert len(line) > 10


@pytest.mark.parametrize("name", subcommands())
def test_every_subcommand_refuses_unknown_options(name):
    message = refused(name, "--no-such-option", "1")
    assert "--no-such-option" in message or "required" in message  # CLI11 names a missing argument first


def test_version():
    assert re.match(r"nsa \d+\.\d+\.\d+", nsa("--version").stdout.decode())


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_a_subcommand_is_needed(arguments):
    refused(*arguments)
