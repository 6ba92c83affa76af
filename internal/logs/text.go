package logs

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// maxTextBytes is the longest message, and the longest text in a field. The name of a tensor may have 4096
// bytes.
const maxTextBytes = 1 << 10

// plain returns a message, shortened to maxTextBytes, in which characters that are not printable are escaped
// as by strconv.Quote: ends of lines, control characters of terminals, and invalid UTF-8.
func plain(text string) string { return escape(cut(text), unprintable) }

func unprintable(r rune) bool { return r == utf8.RuneError || !strconv.IsPrint(r) }

// unquoted reports whether r is not printable and an encoder of fields, which quotes texts as JSON, would not
// escape it.
func unquoted(r rune) bool { return r >= 0x7f && unprintable(r) }

func escape(text string, which func(rune) bool) string {
	if !strings.ContainsFunc(text, which) {
		return text
	}
	var b strings.Builder
	for rest := text; rest != ""; {
		r, n := utf8.DecodeRuneInString(rest)
		if which(r) {
			quoted := strconv.Quote(rest[:n])
			b.WriteString(quoted[1 : len(quoted)-1])
		} else {
			b.WriteString(rest[:n])
		}
		rest = rest[n:]
	}
	return b.String()
}

// cut shortens a text that is longer than maxTextBytes, and appends its length.
func cut(text string) string {
	if len(text) <= maxTextBytes {
		return text
	}
	n := maxTextBytes
	for n > maxTextBytes-utf8.UTFMax && !utf8.RuneStart(text[n]) {
		n--
	}
	return fmt.Sprintf("%s... (%d bytes)", text[:n], len(text))
}

// bounded returns fields with their texts shortened, and escaped where the encoder does not do that. It does
// not change the slice of the caller.
func bounded(fields []zapcore.Field, shorten func(string) string) []zapcore.Field {
	var changed []zapcore.Field
	for i, f := range fields {
		text, ok := textOf(f)
		if !ok {
			continue
		}
		if p := escape(shorten(text), unquoted); p != text {
			if changed == nil {
				changed = append(changed, fields...)
			}
			changed[i] = zap.String(f.Key, p)
		}
	}
	if changed != nil {
		return changed
	}
	return fields
}

// textOf returns the text of a field that holds a string or an error; ok is false for other fields.
func textOf(f zapcore.Field) (text string, ok bool) {
	switch f.Type {
	case zapcore.StringType:
		return f.String, true
	case zapcore.ErrorType:
		err, ok := f.Interface.(error)
		if !ok {
			return "", false
		}
		return err.Error(), true
	}
	return "", false
}
