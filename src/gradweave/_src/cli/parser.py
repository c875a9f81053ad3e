"""How the command line is read: a mistake is one line that says what may have been meant."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import alternatives, closest, printable

Parsed = TypeVar("Parsed")


class Parser(argparse.ArgumentParser):
    """A parser of options that are written out, whose verbs are modules.

    The arguments of a verb are added when it is asked for: those of all verbs take longer than most
    of what is done for one.
    """

    def __init__(self, **settings: Any) -> None:
        self.passes_on_rest = False  # to another program, whose options are its own
        self.takes_command = False  # that program, behind "--" where it has options
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": as_written, "allow_abbrev": False, **settings})
        self.verbs: dict[str, Parser] = {}
        self.noun = ""
        self._add_arguments: Callable[[Parser], None] | None = None

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        self.passes_on_rest |= settings.get("nargs") == argparse.REMAINDER
        self.takes_command |= names == ("command",)
        return super().add_argument(*names, **settings)

    def add_verbs(self, modules: Mapping[str, ModuleType], *, dest: str, noun: str) -> None:
        """Add a verb for each module, whose docstring is its help; the first line sums it up."""
        self.noun = noun
        verbs = self.add_subparsers(
            title=f"{noun}s", dest=dest, required=True, metavar=noun.upper()
        )
        for name, module in modules.items():
            explained = (module.__doc__ or "").strip()
            summary = explained.partition("\n")[0].replace("%", "%%")
            self.verbs[name] = verbs.add_parser(name, help=summary, description=explained)
            # What errors begin with; an inner verb's replaces that of the outer one.
            self.verbs[name].set_defaults(program=self.verbs[name].prog)
            self.verbs[name]._add_arguments = module.add_arguments  # noqa: SLF001 of this class

    def complete(self) -> None:
        """Add this verb's arguments, if that has not been done."""
        add_arguments, self._add_arguments = self._add_arguments, None
        if add_arguments is not None:
            add_arguments(self)

    def parse_known_args(self, *args: Any, **settings: Any) -> Any:
        """Parse as argparse does, which calls this for a verb that was asked for."""
        self.complete()
        return super().parse_known_args(*args, **settings)

    def refuse_unknown(self, given: Sequence[str]) -> None:
        """Refuse a misspelt option or verb before argparse finds that something else is missing."""
        self.complete()
        is_value, command = False, ""
        for place, word in enumerate(given):
            if word == "--":
                return
            option = re.match(r"--?[A-Za-z][^=]*", word)
            if option is not None:
                self._refuse_unknown_option(option[0], command)
                takes_value = self._option_string_actions[option[0]].nargs != 0
                is_value = takes_value and "=" not in word
            elif is_value:
                is_value = False
            elif self.passes_on_rest:
                return
            elif self.verbs:
                if word not in self.verbs:
                    self.error(f"no {self.noun} {word!r}{alternatives(word, self.verbs)}")
                self.verbs[word].refuse_unknown(given[place + 1 :])
                return
            elif self.takes_command:
                command = command or word

    def _refuse_unknown_option(self, name: str, command: str) -> None:
        known = self._option_string_actions
        if name in known:
            return
        if command:
            self.error(f"no option {name}; if it is for {command}, write -- before {command}")
        # A single dash is as often misspelt as a letter.
        close = closest(f"--{name.lstrip('-')}", known)
        self.error(f"no option {name}" + ("" if close is None else f", did you mean {close}?"))

    def error(self, message: str) -> NoReturn:
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {printable(message)}{see} {self.prog} --help\n")


def told(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Wrap a parsing function so that argparse prints what its RequestError says."""

    def parse_or_tell(text: str) -> Parsed:
        try:
            return parse(text)
        except RequestError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_or_tell
