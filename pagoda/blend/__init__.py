"""Position-independent reuse: the KV of a passage, computed once and used wherever the passage stands (CacheBlend).

    passages alone     [ A ]  [ B ]           each a sequence of its own from position 0: exact KV, found by its tokens
    a prompt           [ system | B | A | question ]
    layers 0 and 1     every row is computed: here K and V are exact
    measure            |K, V of layer 1  -  those of the passage alone|, row by row                        select.py
    layers 2, 3, ...   the rows that deviate most are computed, and all outside passages; the others are the passage's
                       own K and V, the keys turned to where they stand now                                rotate.py

After Yao et al., CacheBlend (EuroSys 2025, arXiv:2405.16444). What is blended is near, not equal, to what computing
gives, so it belongs to its request alone and never enters the tree or a tier. The passages alone are exact, and do.
"""
