"""The race.

One conversation against many rules, as LoRA and as aLoRA, live and as an animated picture.
"""
