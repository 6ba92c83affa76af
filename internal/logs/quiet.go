package logs

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// tick is what a storm has one line in, and first how many it has in the beginning.
	tick  = time.Minute
	first = 20
	// maxSorts bounds the sorts of lines that are told apart. What comes beyond it counts as one.
	maxSorts = 1024
	// leftOut is the field with the number of lines like this one that were not written.
	leftOut = "left_out"
)

// Quiet is log for what may come in storms, which must not fill disks: of a sort of lines it writes 20, and then one a minute
// with the number that was left out (left_out), until a minute has passed in which none was. A sort is what has the same level
// and message; of errors also the same text of the error. How many of the last were left out is told along with any
// other line after that minute, or by Sync. nil is a logger that writes nothing. What is quiet already is returned as it is.
func Quiet(log *zap.Logger) *zap.Logger {
	if log == nil {
		return zap.NewNop()
	}
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		if _, ok := c.(*core); ok {
			return c
		}
		return &core{Core: c, sorts: &sorts{all: make(map[sort]*count)}}
	}))
}

// core leaves out what is too much, and bounds the rest. Loggers that With has made of one share its sorts.
type core struct {
	zapcore.Core
	sorts *sorts
}

// With is as zapcore.Core's.
func (c *core) With(fields []zapcore.Field) zapcore.Core {
	return &core{Core: c.Core.With(bounded(fields, cut)), sorts: c.sorts}
}

// Check is as zapcore.Core's. What is left out is decided in Write, which knows the fields.
func (c *core) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write is as zapcore.Core's. Levels from DPanic on are written always: they end something. So is Trace, of which users ask for all.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	e.Message = plain(e.Message)
	shorten := cut
	if e.Level <= Trace {
		shorten = func(text string) string { return text }
	}
	fields = bounded(fields, shorten)
	if e.Level >= zapcore.DPanicLevel || e.Level <= Trace {
		return c.write(e, fields)
	}
	of := sort{level: e.Level, logger: e.LoggerName, message: e.Message}
	if e.Level >= zapcore.ErrorLevel {
		of.cause = cause(fields)
	}
	ok, left, others := c.sorts.take(of, e.Time)
	errs := []error{c.tell(others, e.Time)}
	if left > 0 {
		fields = append(slices.Clip(fields), zap.Int(leftOut, left))
	}
	if ok {
		errs = append(errs, c.write(e, fields))
	}
	return errors.Join(errs...)
}

// Sync tells of what was left out so far, and is as zapcore.Core's.
func (c *core) Sync() error {
	now := time.Now()
	return errors.Join(c.tell(c.sorts.rest(), now), c.Core.Sync())
}

// tell writes how many of some sorts were left out.
func (c *core) tell(some []omission, now time.Time) error {
	var errs []error
	for _, o := range some {
		e := zapcore.Entry{Level: o.level, LoggerName: o.logger, Message: o.message, Time: now}
		if e.Message == "" {
			e.Message = "lines of many sorts"
		}
		fields := []zapcore.Field{zap.Int(leftOut, o.left)}
		if o.cause != "" {
			fields = append(fields, zap.String(errorField, o.cause))
		}
		errs = append(errs, c.write(e, fields))
	}
	return errors.Join(errs...)
}

// write has the core below decide as if it were the logger's own, for one that is several may want the line in some.
func (c *core) write(e zapcore.Entry, fields []zapcore.Field) error {
	var failed failure
	if ce := c.Core.Check(e, nil); ce != nil {
		ce.ErrorOutput = &failed
		ce.Write(fields...)
	}
	return failed.err
}

// sort is what lines are equal by.
type sort struct {
	level                  zapcore.Level
	logger, message, cause string
}

// count is of one sort.
type count struct {
	since         time.Time // begin of its minute
	written, left int       // in it
}

// omission is how many lines of a sort were left out.
type omission struct {
	sort
	left int
}

// sorts counts lines. Its methods are safe for concurrent use.
type sorts struct {
	mu   sync.Mutex
	all  map[sort]*count
	next time.Time // when others are looked at again
}

// take reports whether a line is to be written, how many of its sort were left out before it, and those of other sorts whose
// minute is over.
func (s *sorts) take(of sort, now time.Time) (ok bool, left int, others []omission) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all[of] == nil && len(s.all) >= maxSorts || !now.Before(s.next) {
		others = s.sweep(of, now)
	}
	c := s.all[of]
	if c == nil {
		if len(s.all) >= maxSorts {
			of = sort{level: of.level}
		}
		if c = s.all[of]; c == nil {
			c = &count{since: now}
			s.all[of] = c
		}
	}
	if now.Sub(c.since) >= tick {
		left = c.left
		c.renew(now)
	}
	if c.written < first {
		c.written++
		return true, left, others
	}
	c.left++
	return false, 0, others
}

// renew begins another minute, in which a storm that goes on has one line.
func (c *count) renew(now time.Time) {
	written := 0
	if c.left > 0 {
		written = first - 1
	}
	*c = count{since: now, written: written}
}

// sweep forgets sorts that have been silent for their minute, and tells of those whose storm may be over. The caller holds mu.
func (s *sorts) sweep(but sort, now time.Time) (left []omission) {
	s.next = now.Add(tick)
	for of, c := range s.all {
		switch over := c.since.Add(tick); {
		case over.After(now):
			if over.Before(s.next) {
				s.next = over
			}
		case of == but:
		case c.left == 0:
			delete(s.all, of)
		default:
			left = append(left, omission{of, c.left})
			c.renew(now)
			c.written++ // the telling is the line of this minute
		}
	}
	return sorted(left)
}

// rest tells of all that was left out and not told.
func (s *sorts) rest() (left []omission) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for of, c := range s.all {
		if c.left > 0 {
			left = append(left, omission{of, c.left})
			c.left = 0
		}
	}
	return sorted(left)
}

// sorted is in an order that does not change from run to run.
func sorted(some []omission) []omission {
	slices.SortFunc(some, func(a, b omission) int {
		return cmp.Or(cmp.Compare(b.level, a.level), cmp.Compare(a.logger, b.logger), cmp.Compare(a.message, b.message), cmp.Compare(a.cause, b.cause))
	})
	return some
}

// failure is what a core says about a line that it could not write.
type failure struct{ err error }

func (f *failure) Write(b []byte) (int, error) {
	f.err = errors.Join(f.err, errors.New(strings.TrimSpace(string(b))))
	return len(b), nil
}

// Sync is nothing's.
func (f *failure) Sync() error { return nil }
