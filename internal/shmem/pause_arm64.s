#include "textflag.h"

// func Pause(n int)
TEXT ·Pause(SB), NOSPLIT, $0-8
	MOVD n+0(FP), R0
loop:
	SUBS $1, R0, R0
	BLT  done
	YIELD
	B    loop
done:
	RET

// func Fence()
TEXT ·Fence(SB), NOSPLIT, $0-0
	DMB $0xb // ISH, loads and stores
	RET
