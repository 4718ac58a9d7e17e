#include "textflag.h"

// func call(fn, stack uintptr, arg unsafe.Pointer)
//
// The x86-64 ABI: the argument in DI, the stack aligned to 16 bytes at the call, BX and BP
// kept by the callee. ABI0 lets it have all other registers.
TEXT ·call(SB), NOSPLIT, $0-24
	MOVQ fn+0(FP), AX
	MOVQ stack+8(FP), CX
	MOVQ arg+16(FP), DI
	MOVQ SP, BX
	MOVQ CX, SP
	CALL AX
	MOVQ BX, SP
	RET
