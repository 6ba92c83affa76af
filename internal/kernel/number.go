package kernel

// number is the constraint for types with Go's arithmetic.
type number interface{ whole | float }

type whole interface {
	uint8 | int8 | uint16 | int16 | int32 | int64
}

type float interface{ float32 | float64 }

// integer returns the row of T, whose values range from lowest to highest.
func integer[T whole](lowest, highest T) row {
	r := arithmetic[T]()
	r.scale, r.divide = scaleInteger(lowest, highest), divide[T]
	r.neutral = neutralsOf(0, 1, lowest, highest)
	return r
}

// arithmetic returns the functions that all number types have in common.
func arithmetic[T number]() row {
	return row{reductions: reductions[IntoFunc]{
		sum: pairs(add[T]), min: pairs(minimum[T]), max: pairs(maximum[T]), product: pairs(multiply[T]),
	}}
}

// The compiler neither unrolls loops nor inlines a function argument into a loop. So the loops below are
// written out for each operation, with four elements per iteration. Slices of constant length make the
// compiler check bounds once per iteration and not for each element.

func add[T number](d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	i := 0
	for ; i <= len(d)-4; i += 4 {
		z, x, y := d[i:i+4:i+4], a[i:i+4:i+4], b[i:i+4:i+4]
		z[0] = x[0] + y[0]
		z[1] = x[1] + y[1]
		z[2] = x[2] + y[2]
		z[3] = x[3] + y[3]
	}
	for ; i < len(d); i++ {
		d[i] = a[i] + b[i]
	}
}

func multiply[T number](d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	i := 0
	for ; i <= len(d)-4; i += 4 {
		z, x, y := d[i:i+4:i+4], a[i:i+4:i+4], b[i:i+4:i+4]
		z[0] = x[0] * y[0]
		z[1] = x[1] * y[1]
		z[2] = x[2] * y[2]
		z[3] = x[3] * y[3]
	}
	for ; i < len(d); i++ {
		d[i] = a[i] * b[i]
	}
}

func minimum[T number](d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	i := 0
	for ; i <= len(d)-4; i += 4 {
		z, x, y := d[i:i+4:i+4], a[i:i+4:i+4], b[i:i+4:i+4]
		z[0] = min(x[0], y[0])
		z[1] = min(x[1], y[1])
		z[2] = min(x[2], y[2])
		z[3] = min(x[3], y[3])
	}
	for ; i < len(d); i++ {
		d[i] = min(a[i], b[i])
	}
}

func maximum[T number](d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	i := 0
	for ; i <= len(d)-4; i += 4 {
		z, x, y := d[i:i+4:i+4], a[i:i+4:i+4], b[i:i+4:i+4]
		z[0] = max(x[0], y[0])
		z[1] = max(x[1], y[1])
		z[2] = max(x[2], y[2])
		z[3] = max(x[3], y[3])
	}
	for ; i < len(d); i++ {
		d[i] = max(a[i], b[i])
	}
}

// scaleInteger returns the ScaleFunc of T, whose values range from lowest to highest.
func scaleInteger[T whole](lowest, highest T) ScaleFunc {
	// A float64 cannot represent math.MaxInt64, but it can represent the next integer, highest+1. If f is at
	// least highest+1, it is out of range even after truncation.
	low, beyond := float64(lowest), float64(highest)+1
	return func(buf []byte, factor float64) {
		v := elems[T](buf)
		if factor == 1 {
			return
		}
		for i, x := range v {
			switch f := float64(x) * factor; {
			case f > low && f < beyond:
				v[i] = T(f)
			case f >= beyond:
				v[i] = highest
			case f <= low:
				v[i] = lowest
			default: // f is a NaN
				v[i] = 0
			}
		}
	}
}

func divide[T whole](buf []byte, n int64) {
	v := elems[T](buf)
	for i, x := range v {
		v[i] = T(int64(x) / n)
	}
}
