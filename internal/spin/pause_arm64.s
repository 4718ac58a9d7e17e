#include "textflag.h"

// func procyield(n uint32)
TEXT ·procyield(SB), NOSPLIT, $0-4
	MOVWU n+0(FP), R0
again:
	YIELD
	SUBW $1, R0
	CBNZ R0, again
	RET
