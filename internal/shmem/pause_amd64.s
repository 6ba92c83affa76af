#include "textflag.h"

// func Pause(n int)
TEXT ·Pause(SB), NOSPLIT, $0-8
	MOVQ n+0(FP), CX
loop:
	SUBQ $1, CX
	JLT  done
	PAUSE
	JMP  loop
done:
	RET

// func Fence()
TEXT ·Fence(SB), NOSPLIT, $0-0
	MFENCE
	RET
