package hvd

import (
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger logs to standard error from the given level on. The level is one that config accepts.
func newLogger(level string) (*zap.Logger, error) {
	at, ok := map[string]zapcore.Level{
		"trace": zapcore.DebugLevel, "debug": zapcore.DebugLevel, "info": zapcore.InfoLevel,
		"warning": zapcore.WarnLevel, "error": zapcore.ErrorLevel, "fatal": zapcore.FatalLevel,
	}[level]
	if !ok {
		at = zapcore.WarnLevel
	}
	c := zap.NewProductionConfig()
	c.Encoding = "console"
	c.EncoderConfig = zap.NewDevelopmentEncoderConfig()
	c.Level = zap.NewAtomicLevelAt(at)
	c.DisableStacktrace, c.DisableCaller = true, true
	return c.Build()
}
