"""The paper's row path: gates packed row by row as TwELL, one token at a time. Kept to compare with."""
