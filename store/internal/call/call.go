// Package call has what the implementations of store.Store in several packages need for each call: the checks
// of its arguments, and its errors.
package call

import (
	"errors"
	"fmt"
)

// These are the constants of package store.
const (
	MaxKeyBytes   = 8 << 10
	MaxValueBytes = 8 << 20
	MaxKeys       = 128 << 10
)

// ErrLimit is store.ErrLimit.
var ErrLimit = errors.New("limit exceeded")

// Refusal is the reason why a store refuses a call. A server can send it to a client.
type Refusal struct {
	Kind   error // ErrLimit or another error variable of package store
	Detail string
}

// Refuse returns a *Refusal.
func Refuse(kind error, detail string) error { return &Refusal{kind, detail} }

func (r *Refusal) Error() string { return r.Kind.Error() + ": " + r.Detail }

func (r *Refusal) Unwrap() error { return r.Kind }

// Error adds the operation, the key and the store to err. The parameter where is the address or path of the
// store, or empty if the store is in this process.
func Error(op, key, where string, err error) error {
	if where != "" {
		where = " at " + where
	}
	return fmt.Errorf("store: %s %.128q%s: %w", op, key, where, err)
}

// CheckKey returns an error if key is empty or too long.
func CheckKey(key string) error {
	if len(key) < 1 || len(key) > MaxKeyBytes {
		return Refuse(ErrLimit, fmt.Sprintf("key has %d bytes, want 1 to %d", len(key), MaxKeyBytes))
	}
	return nil
}

// CheckKeys returns an error if there are too many keys, or if one of them is empty or too long.
func CheckKeys(keys []string) error {
	if len(keys) > MaxKeys {
		return Refuse(ErrLimit, fmt.Sprintf("got %d keys, want at most %d", len(keys), MaxKeys))
	}
	for _, k := range keys {
		if err := CheckKey(k); err != nil {
			return err
		}
	}
	return nil
}

// CheckPairs returns an error if the arguments of MultiSet exceed a limit, or if keys and values have
// different lengths.
func CheckPairs(keys []string, values [][]byte) error {
	if len(keys) != len(values) {
		return fmt.Errorf("got %d keys and %d values, want equal numbers", len(keys), len(values))
	}
	if err := CheckKeys(keys); err != nil {
		return err
	}
	for _, v := range values {
		if err := CheckValue(v); err != nil {
			return err
		}
	}
	return nil
}

// CheckValue returns an error if value is too long.
func CheckValue(value []byte) error {
	if len(value) > MaxValueBytes {
		return Refuse(ErrLimit, fmt.Sprintf("value has %d bytes, want at most %d", len(value),
			MaxValueBytes))
	}
	return nil
}
