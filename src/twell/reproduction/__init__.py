"""The paper's experiments: recipes, one run after the other, and our figures beside the paper's."""
