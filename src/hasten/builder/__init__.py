"""From a model to a bundle: load · export · check · optimize · verify · bench · choose · write."""
