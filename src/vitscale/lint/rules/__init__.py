"""The rules, by topic: each is a function from a `View` to its findings; `vitscale.lint.table` lists them."""
