package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/netif"
)

// kind is a type of values. unit is the unit of its numbers, or empty. want is a description of valid values.
// read parses a text and stores the value in a Config. If the text is not valid, read either returns an error
// or sets ok to false. It returns an error only if the error describes the problem better than the text in
// want.
type kind struct {
	unit string
	want string
	read func(c *Config, text string) (ok bool, err error)
}

// set parses text and stores the value in c. An error says which values are valid.
func (k kind) set(c *Config, text string) error {
	ok, err := k.read(c, text)
	if err == nil && !ok {
		err = errors.New("want " + k.want)
	}
	return err
}

// canonical returns the canonical form of a value. Texts that mean the same value have the same canonical
// form.
func (k kind) canonical(text string) string {
	if v, ok := boolean(text); ok && k.want == wantBoolean {
		return digit(v)
	}
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return strings.ToLower(text)
}

// Want returns a description of valid values.
func (k kind) Want() string { return k.want }

// Unit returns the unit of numbers in the environment, or "" if the values have no unit.
func (k kind) Unit() string { return k.unit }

// form describes how a value is written in the file and in flags, for settings where this differs from the
// environment.
type form struct {
	note string // text for docs/settings.md about the difference
	want string
	read func(text string) (environment string, ok bool)
}

var (
	// mebibytes is the form for numbers of bytes. As in Horovod, these numbers are in MiB in flags and in the
	// file.
	mebibytes = &form{", in MiB, as in the flag", "a number of MiB, 0 to 1000000",
		func(text string) (string, bool) {
			v, ok := number(text, 0)
			return strconv.FormatInt(int64(v*(1<<20)), 10), ok
		}}
	// negated is the form for a setting that turns a feature off but whose key in the file turns the feature
	// on.
	negated = &form{", which is inverted: true there means 0 here", wantBoolean, func(text string) (string, bool) {
		v, ok := boolean(text)
		return digit(!v), ok
	}}
)

const wantBoolean = "a boolean: 1, 0, true, false, yes or no"

// anything returns the kind of settings for which Config has no field. Callers read their values with
// Config.Value, or the loader reads them before all other settings.
func anything(want string) kind {
	return kind{want: want, read: func(*Config, string) (bool, error) { return true, nil }}
}

func text(want string, field func(*Config) *string) kind {
	return kind{want: want, read: func(c *Config, text string) (bool, error) {
		*field(c) = text
		return true, nil
	}}
}

func whole(field func(*Config) *int, least int) kind {
	return integer("", fmt.Sprintf("a whole number of at least %d", least), field, least, math.MaxInt32)
}

func bytesOf(field func(*Config) *int64) kind {
	return integer("bytes", "a whole number of bytes, 0 or more", field, 0, math.MaxInt64)
}

func port(field func(*Config) *int) kind {
	return integer("", "a port, 1 to 65535", field, 1, math.MaxUint16)
}

func integer[T int | int64](unit, want string, field func(*Config) *T, least, most T) kind {
	return kind{unit, want, func(c *Config, text string) (bool, error) {
		v, err := strconv.ParseInt(text, 10, 64)
		ok := err == nil && v >= int64(least) && v <= int64(most)
		if ok {
			*field(c) = T(v)
		}
		return ok, nil
	}}
}

func fraction(field func(*Config) *float64) kind {
	return kind{want: "a number from 0 to 1", read: func(c *Config, text string) (bool, error) {
		v, ok := number(text, 0)
		if ok = ok && v <= 1; ok {
			*field(c) = v
		}
		return ok, nil
	}}
}

func boolOf(field func(*Config) *bool) kind {
	return kind{want: wantBoolean, read: func(c *Config, text string) (bool, error) {
		v, ok := boolean(text)
		if ok {
			*field(c) = v
		}
		return ok, nil
	}}
}

// boolean parses words and numbers. As in Horovod, a number is true if it is greater than 0.
func boolean(text string) (v, ok bool) {
	switch strings.ToLower(text) {
	case "true", "yes":
		return true, true
	case "false", "no":
		return false, true
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n > 0, err == nil
}

func digit(v bool) string {
	if v {
		return "1"
	}
	return "0"
}

func seconds(field func(*Config) *time.Duration, least float64) kind {
	return duration("seconds", time.Second, field, least)
}

func milliseconds(field func(*Config) *time.Duration, least float64) kind {
	return duration("milliseconds", time.Millisecond, field, least)
}

func duration(unit string, one time.Duration, field func(*Config) *time.Duration, least float64) kind {
	return kind{unit, fmt.Sprintf("a number of %s, %v to %d", unit, least, most),
		func(c *Config, text string) (bool, error) {
			v, ok := number(text, least)
			if ok {
				*field(c) = time.Duration(v * float64(one))
			}
			return ok, nil
		}}
}

// most is the largest value of a setting that may have a fraction.
const most = 1_000_000

// number parses a number. The result ok is false if the number is NaN, less than the parameter least, or
// greater than the constant most.
func number(text string, least float64) (float64, bool) {
	v, err := strconv.ParseFloat(text, 64)
	return v, err == nil && v >= least && v <= most
}

// short returns the kind of texts that are sent in handshakes.
func short(field func(*Config) *string) kind {
	return kind{want: "at most 64 bytes", read: func(c *Config, text string) (bool, error) {
		*field(c) = text
		return len(text) <= 64, nil
	}}
}

// numbers returns the kind of lists of numbers.
func numbers(field func(*Config) *[]int) kind {
	return kind{want: "whole numbers of at least 0 with commas between them",
		read: func(c *Config, text string) (bool, error) {
			var list []int
			for _, number := range strings.Split(text, ",") {
				v, err := strconv.ParseInt(strings.TrimSpace(number), 10, 32)
				if err != nil || v < 0 {
					return false, nil
				}
				list = append(list, int(v))
			}
			*field(c) = list
			return true, nil
		}}
}

// oneOf returns the kind of values that equal an element of words, in upper or lower case. When a value is
// read, the function set is called with the equal element of words.
func oneOf(set func(c *Config, word string), words ...string) kind {
	last := len(words) - 1
	return kind{want: strings.Join(words[:last], ", ") + " or " + words[last],
		read: func(c *Config, text string) (bool, error) {
			for _, w := range words {
				if strings.EqualFold(w, text) {
					set(c, w)
					return true, nil
				}
			}
			return false, nil
		}}
}

// builtOnly returns the kind of a setting that chooses among Horovod's names for backends. known is the kind
// for the names that stand for a backend of gohvd. One of them is mpi, which only some builds have. others
// holds the names of backends that gohvd does not have.
func builtOnly(known kind, others ...string) kind {
	k := known
	k.read = func(c *Config, text string) (bool, error) {
		for _, o := range others {
			if strings.EqualFold(o, text) {
				return false, fmt.Errorf("which gohvd does not have: want %s", k.want)
			}
		}
		if strings.EqualFold(text, "mpi") && !BuiltMPI {
			return false, errors.New("but this program was built without MPI: build it with -tags mpi (docs/mpi.md)")
		}
		return known.read(c, text)
	}
	return k
}

// controllers returns the kind of the setting that chooses a controller.
func controllers() kind {
	return oneOf(func(c *Config, word string) { c.MPIController = word == "mpi" }, "gloo", "tcp", "mpi")
}

// cpuOperations returns the kind of the setting that chooses a backend for tensors in host memory.
func cpuOperations() kind {
	return oneOf(func(c *Config, word string) {
		c.SharedMemory = map[string]SharedMemory{"gloo": SharedByHost, "shm,tcp": SharedIfPossible,
			"shm": SharedAlways, "tcp": SharedNever, "mpi": SharedNever}[word]
		c.MPIOperations = word == "mpi"
	}, "gloo", "shm,tcp", "shm", "tcp", "mpi")
}

func interfaces(field func(*Config) *[]string) kind {
	return kind{want: "interfaces, addresses or networks with commas between them",
		read: func(c *Config, text string) (bool, error) {
			list := strings.Split(text, ",")
			if _, err := netif.Parse(list); err != nil {
				return false, fmt.Errorf(
					"want interfaces, addresses or networks with commas between them: %w", err)
			}
			*field(c) = list
			return true, nil
		}}
}
