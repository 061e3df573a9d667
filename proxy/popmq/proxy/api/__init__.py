"""The public protocol: its definitions and the modules generated from them."""
