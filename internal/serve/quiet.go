package serve

import (
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// How many lines with one message are logged in a while, and of how many further ones one.
const (
	quietTick       = 10 * time.Second
	quietFirst      = 20
	quietThereafter = 1000
)

// Quiet is log for what strangers can cause, who must not fill disks: of lines with equal messages it writes 20 in ten
// seconds, and then each thousandth. nil is a logger that writes nothing.
func Quiet(log *zap.Logger) *zap.Logger {
	if log == nil {
		return zap.NewNop()
	}
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(c, quietTick, quietFirst, quietThereafter)
	}))
}
