"""What every command shares: its declaration in Click, its arguments, and what it prints.

Always holds: A command's module is imported only when that command is called, and rich only where
a table is printed.

May import: popmq.common.
"""
