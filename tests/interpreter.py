"""Triton's interpreter, without work whose result it does not use."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache


@cache
def hasten() -> None:
    """Make interpreted kernels take less than half of the time; they compute and check the same.

    In another version of Triton, which has other insides, they take as long as they take.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_language_once(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        _look_types_up_once(interpreter)
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        # Every sum of integers is computed twice for an assertion that is made in debug mode only.
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _patch_language_once(interpreter) -> None:
    """A launch replaces Triton's builtins by interpreted ones; each call of a device function, `tl.sum` say,
    would look through all of them again to find them replaced."""
    language, patch = interpreter.tl, interpreter._patch_lang

    @cache
    def visible_languages(fn):
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return [module for module in modules if module in (language, language.core)]

    def patch_unless_patched(fn):
        languages = visible_languages(fn)
        if not languages or any(language.core.is_builtin(module.load) for module in languages):
            return patch(fn)
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_unless_patched


def _look_types_up_once(interpreter) -> None:
    """Every operation would build a table of all types to find NumPy's name for one."""
    look_up, known = interpreter._get_np_dtype, {}

    def looked_up(dtype):
        if dtype.name not in known:  # a block's or a pointer's says what is inside
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = looked_up
