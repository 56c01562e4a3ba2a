"""A command line as words and operators, with its quotes, substitutions and heredocs."""

import re

OPERATORS = (
    "&&",
    "||",
    "|&",
    "|",
    ";;",
    ";",
    "\n",
    "(",
    ")",
    "&>>",
    "&>",
    "2>&1",
    "1>&2",
    ">&2",
    "2>>",
    "2>",
    "1>",
    ">>",
    ">",
    "<<<",
    "<<-",
    "<<",
    "<",
    "&",
)


class ShellError(Exception):
    """A command line that cannot be run: (message, return code)."""


class Word(list):
    """The parts of a word, (text, how): how is `plain` (expand, split, glob), `double` (expand) or `single` (as it is)."""


def tokenise(text):
    """A command line as words and operators.

    Raises:
      ShellError: a quote or a heredoc that does not end.
    """
    tokens, heredocs, position = [], [], 0
    word = None

    def end():
        nonlocal word
        if word is not None:
            tokens.append(word)
        word = None

    while position < len(text):
        char = text[position]
        if char in " \t":
            end()
            position += 1
        elif text.startswith("\\\n", position):
            position += 2
        elif char == "#" and word is None:
            newline = text.find("\n", position)
            position = len(text) if newline < 0 else newline
        elif char == "'":
            close = text.find("'", position + 1)
            if close < 0:
                raise ShellError("bash: -c: line 1: unexpected EOF while looking for matching `''", 2)
            word = word if word is not None else Word()
            word.append((text[position + 1 : close], "single"))
            position = close + 1
        elif char == '"':
            word = word if word is not None else Word()
            position = _double(text, position + 1, word)
        elif char == "\\":
            word = word if word is not None else Word()
            word.append((text[position + 1 : position + 2], "single"))
            position += 2
        elif char == "$" and text.startswith("$(", position):
            close = _closing(text, position + 1)
            word = word if word is not None else Word()
            word.append((text[position:close], "plain"))
            position = close
        else:
            operator = next((op for op in OPERATORS if text.startswith(op, position)), None)
            if operator in ("2>&1", "2>", "2>>", "1>", "1>&2") and word is not None:
                operator = None
            if operator is None:
                word = word if word is not None else Word()
                if word and word[-1][1] == "plain" and not word[-1][0].endswith(")"):
                    word[-1] = (word[-1][0] + char, "plain")
                else:
                    word.append((char, "plain"))
                position += 1
                continue
            end()
            position += len(operator)
            if operator in ("<<", "<<-"):
                match = re.compile(r"[ \t]*(['\"]?)([^\s'\"|&;<>()]+)\1").match(text, position)
                if not match:
                    raise ShellError("bash: -c: line 1: syntax error near unexpected token `newline'", 2)
                position = match.end()
                heredocs.append((len(tokens), operator, match[2], bool(match[1])))
                tokens += ["<<", None]
                continue
            tokens.append(operator)
            if operator == "\n" and heredocs:
                for index, kind, mark, quoted in heredocs:
                    position = _heredoc(text, position, tokens, index, kind, mark, quoted)
                heredocs = []
    end()
    for index, kind, mark, quoted in heredocs:
        _heredoc(text, len(text), tokens, index, kind, mark, quoted)
    return tokens


def _double(text, position, word):
    """Reads to the closing double quote; (text, "double") goes to the word."""
    part = ""
    while position < len(text) and text[position] != '"':
        if text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\", "`"):
            part += text[position + 1]
            position += 2
        elif text.startswith("\\$", position):
            word += [(part, "double"), ("$", "single")]
            part = ""
            position += 2
        elif text.startswith("\\\n", position):
            position += 2
        elif text.startswith("$(", position):
            close = _closing(text, position + 1)
            part += text[position:close]
            position = close
        else:
            part += text[position]
            position += 1
    if position >= len(text):
        raise ShellError("bash: -c: line 1: unexpected EOF while looking for matching `\"'", 2)
    word.append((part, "double"))
    return position + 1


def _closing(text, position):
    """The place after the parenthesis that closes the one at `position`."""
    depth = 0
    while position < len(text):
        if text[position] == "'":
            position = text.find("'", position + 1)
            if position < 0:
                break
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        position += 1
        if depth == 0:
            return position
    raise ShellError("bash: -c: line 1: unexpected EOF while looking for matching `)'", 2)


def _heredoc(text, position, tokens, index, kind, mark, quoted):
    lines = []
    while position < len(text):
        newline = text.find("\n", position)
        stop = len(text) if newline < 0 else newline
        line = text[position:stop]
        position = stop + 1
        if kind == "<<-":
            line = line.lstrip("\t")
        if line == mark:
            break
        lines.append(line + "\n")
    tokens[index + 1] = Word([("".join(lines), "single" if quoted else "heredoc")])
    return position
