"""Scripts that complete `meshplan` commands in bash, zsh and fish, made from the parser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Final

_FILES: Final = frozenset({"PLAN", "FILE", "PATH"})
"""Placeholders of flags whose values are files."""


def completion_to_text(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion script of a shell.

    Args:
        shell: "bash", "zsh" or "fish".
        parser: The parser of the whole command line, with its subcommands.
    """
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](parser)


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield (name, help, parser) of each subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for name, sub in action.choices.items():
                yield name, helps.get(name, ""), sub


def _flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """List the flags of a subcommand, and the words that an argument without a flag may be."""
    flags = [word for action in _flags(parser) for word in action.option_strings]
    choices = [
        str(word)
        for action in parser._actions
        if not action.option_strings
        for word in action.choices or ()
    ]
    return flags + choices


def _bash(parser: argparse.ArgumentParser) -> str:
    verbs = {name: _words(sub) for name, _, sub in _verbs(parser)}
    cases = "\n".join(
        f"    {name}) words={shlex.quote(' '.join(words))} ;;" for name, words in verbs.items()
    )
    return f"""\
# eval "$(meshplan completion bash)"
_meshplan() {{
  local words here=${{COMP_WORDS[COMP_CWORD]}}
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={shlex.quote(" ".join(verbs))}
  else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$here"))
}}
complete -o default -F _meshplan meshplan"""


def _zsh(parser: argparse.ArgumentParser) -> str:
    # zsh runs completion functions of bash; `compdef` exists once `compinit` has run.
    return (
        '# eval "$(meshplan completion zsh)"\n'
        "autoload -U +X compinit && compinit\n"
        "autoload -U +X bashcompinit && bashcompinit\n" + _bash(parser).partition("\n")[2]
    )


def _fish(parser: argparse.ArgumentParser) -> str:
    lines = ["# meshplan completion fish | source", "complete -c meshplan -f"]
    for name, help, sub in _verbs(parser):
        say = f"-d {shlex.quote(help)}"
        lines.append(f"complete -c meshplan -n __fish_use_subcommand -a {name} {say}")
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for action in sub._actions:
            say = f"-d {shlex.quote(action.help or '')}"
            if not action.option_strings:
                for word in action.choices or ():
                    lines.append(f"complete -c meshplan {seen} -a {shlex.quote(str(word))} {say}")
                continue
            named = " ".join(
                f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"
                for word in action.option_strings
            )
            takes = "" if action.nargs == 0 else " -r"
            takes += " -F" if action.metavar in _FILES else ""
            if takes and action.choices:
                takes += f" -a {shlex.quote(' '.join(map(str, action.choices)))}"
            lines.append(f"complete -c meshplan {seen} {named}{takes} {say}")
    return "\n".join(lines)
