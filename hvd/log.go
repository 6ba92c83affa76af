package hvd

import (
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger logs to standard error from the given level on, with or without the time. The level is one that config accepts.
func newLogger(level string, withTime bool) (*zap.Logger, error) {
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
	if !withTime {
		c.EncoderConfig.TimeKey = zapcore.OmitKey
	}
	c.Level = zap.NewAtomicLevelAt(at)
	c.DisableStacktrace, c.DisableCaller = true, true
	return c.Build()
}
