package config

import (
	"io"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/logs"
)

// Logger returns a logger that writes to w and obeys the settings HOROVOD_LOG_LEVEL, HOROVOD_LOG_HIDE_TIME
// and HVD_LOG_FORMAT. For a zero Config it logs warnings and errors.
func (c *Config) Logger(w io.Writer) *zap.Logger {
	return logs.New(w, logs.Level(c.LogLevel), c.LogFormat, !c.LogHideTime)
}
