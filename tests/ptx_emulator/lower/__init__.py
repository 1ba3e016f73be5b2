"""PTX instructions into Python: straight-line runs become one generated function, the rest a closure each.

Two registries (registry.py). `@generated("add", ...)` adds lines to the function of a straight-line run through `Code`
(code.py); `@special("mbarrier.init", ...)` builds a closure for what touches barriers, engines or control flow.
The longest registered dotted prefix of an instruction's name decides.
"""
