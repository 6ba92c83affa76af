package logs

import (
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// tick is the interval in which at most perTick lines of a level and message are written.
	tick    = time.Minute
	perTick = 20
	// leftOut is the field with the number of lines that the sampler has dropped.
	leftOut = "left_out"
)

// Quiet returns log with zap's sampler over it, for what may come in storms and must not fill disks. Of each level and message it
// writes at most 20 lines a minute. The next line that is written, or Sync, has the number of those that were dropped (left_out),
// of all messages together. Lines at Trace are never dropped. Texts are bounded, and what does not print is escaped. If log is nil
// the logger writes nothing; a logger that is quiet already is returned as it is.
func Quiet(log *zap.Logger) *zap.Logger {
	if log == nil {
		return zap.NewNop()
	}
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		if _, ok := c.(sampled); ok {
			return c
		}
		dropped := new(atomic.Int64)
		count := func(_ zapcore.Entry, decision zapcore.SamplingDecision) {
			if decision&zapcore.LogDropped != 0 {
				dropped.Add(1)
			}
		}
		return sampled{zapcore.NewSamplerWithOptions(&core{c, dropped}, tick, perTick, 0, zapcore.SamplerHook(count))}
	}))
}

// sampled is a sampler over a core of this package.
type sampled struct{ zapcore.Core }

// With implements zapcore.Core.
func (s sampled) With(fields []zapcore.Field) zapcore.Core { return sampled{s.Core.With(fields)} }

// core bounds texts, and adds how many lines were dropped before. Loggers that With has made of one share the counter.
type core struct {
	zapcore.Core
	dropped *atomic.Int64
}

// With implements zapcore.Core.
func (c *core) With(fields []zapcore.Field) zapcore.Core {
	return &core{c.Core.With(bounded(fields, cut)), c.dropped}
}

// Check implements zapcore.Core.
func (c *core) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core. The core below checks the entry again, because a tee of several writes it to some of them only.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	e.Message = plain(e.Message)
	shorten := cut
	if e.Level <= Trace {
		shorten = func(text string) string { return text }
	}
	fields = bounded(fields, shorten)
	var failed failure
	ce := c.Core.Check(e, nil)
	if ce == nil {
		return nil
	}
	if n := c.dropped.Swap(0); n > 0 {
		fields = append(fields[:len(fields):len(fields)], zap.Int64(leftOut, n))
	}
	ce.ErrorOutput = &failed
	ce.Write(fields...)
	return failed.err
}

// Sync writes how many lines were dropped and not told, and flushes the core below.
func (c *core) Sync() error {
	var err error
	if n := c.dropped.Load(); n > 0 {
		err = c.Write(zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(), Message: "lines were left out of the log"}, nil)
	}
	return errors.Join(err, c.Core.Sync())
}

// failure collects what zap reports of a line that could not be written.
type failure struct{ err error }

// Write implements zapcore.WriteSyncer.
func (f *failure) Write(b []byte) (int, error) {
	f.err = errors.Join(f.err, errors.New(strings.TrimSpace(string(b))))
	return len(b), nil
}

// Sync implements zapcore.WriteSyncer.
func (f *failure) Sync() error { return nil }
