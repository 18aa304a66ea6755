"""`trace-fit estimate`: memory and time of a training step by arithmetic, before a GPU is rented.

cards    what a GPU can do                    memory   bytes by item, and the peak of each phase
plan     the model, its batch and settings    speed    seconds by phase, each a range
report   tables, advice, JSON                 command  options, and what a config says
"""
