"""The routes, a few lines each: check, ask the model, write down what it said."""
