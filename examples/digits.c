/* Trains a small network on handwritten digits, data-parallel, through the C library (docs/c-api.md). It computes
 * the same as examples/digits, which is in Go and has the explanations, and ends with the same weights.
 *
 *	make libgohvd
 *	go build -o bin/ ./cmd/hvdrun
 *	cc -std=c99 -D_GNU_SOURCE -O2 -Icmd/libgohvd -o digits examples/digits.c -Lbin -lgohvd -lm -Wl,-rpath,$PWD/bin
 *	bin/hvdrun -np 4 ./digits examples/optdigits/optdigits.csv.gz
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gohvd.h"

enum { PIXELS = 64, CLASSES = 10, HIDDEN = 48, IMAGES = 1797, TRAINING = IMAGES * 4 / 5, EPOCHS = 20, BATCH = 64 };

static const float rate = 0.1f, momentum = 0.9f;

typedef struct image {
	float pixels[PIXELS];
	int digit;
} image;

/* model has the weights of a perceptron with one hidden layer. A gradient has the same type. Backpropagation
 * finishes the gradients in the order of the fields. */
typedef struct model {
	float b2[CLASSES], w2[CLASSES * HIDDEN], b1[HIDDEN], w1[HIDDEN * PIXELS];
} model;

enum { PARAMETERS = 4 };

static const char *const names[PARAMETERS] = {"fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"};
static const int64_t sizes[PARAMETERS] = {CLASSES, CLASSES *HIDDEN, HIDDEN, HIDDEN *PIXELS};

static float *parameter(model *m, int i) {
	float *all[PARAMETERS] = {m->b2, m->w2, m->b1, m->w1};
	return all[i];
}

/* check ends the program if a call has failed. The other ranks then learn that this rank has failed. */
static void check(hvd_status_t status) {
	if (status != HVD_SUCCESS) {
		hvd_error_t error = {sizeof error, 0, NULL, NULL, NULL, NULL, 0, 0};
		hvd_last_error(&error);
		fprintf(stderr, "digits: %s\n", error.text);
		exit(1);
	}
}

/* random is the generator PCG-DXSM, as in Go's package math/rand/v2. */
typedef struct random {
	unsigned __int128 state;
} random_t;

static random_t seeded(uint64_t high, uint64_t low) {
	random_t r = {(unsigned __int128)high << 64 | low};
	return r;
}

static uint64_t next(random_t *r) {
	const unsigned __int128 mul = (unsigned __int128)2549297995355413924u << 64 | 4865540595714422341u;
	const unsigned __int128 inc = (unsigned __int128)6364136223846793005u << 64 | 1442695040888963407u;
	r->state = r->state * mul + inc;
	uint64_t high = (uint64_t)(r->state >> 64), low = (uint64_t)r->state;
	high ^= high >> 32;
	high *= 0xda942042e4dd58b5u;
	high ^= high >> 48;
	return high * (low | 1);
}

/* below returns a random number less than n. */
static uint32_t below(random_t *r, uint32_t n) {
	if ((n & (n - 1)) == 0) {
		return (uint32_t)next(r) & (n - 1);
	}
	uint64_t product = (next(r) >> 32) * n;
	while ((uint32_t)product < -n % n) {
		product = (next(r) >> 32) * n;
	}
	return (uint32_t)(product >> 32);
}

static void initialize(model *m, uint64_t seed) {
	random_t r = seeded(seed, 1);
	double limit = sqrt(6 / (double)(PIXELS + HIDDEN));
	memset(m, 0, sizeof *m);
	for (int i = 0; i < HIDDEN * PIXELS; i++) {
		m->w1[i] = (float)((2 * ((double)(next(&r) << 11 >> 11) / (1ll << 53)) - 1) * limit);
	}
	limit = sqrt(6 / (double)(HIDDEN + CLASSES));
	for (int i = 0; i < CLASSES * HIDDEN; i++) {
		m->w2[i] = (float)((2 * ((double)(next(&r) << 11 >> 11) / (1ll << 53)) - 1) * limit);
	}
}

/* load reads the images and puts them in a random order. */
static void load(const char *path, image *images) {
	char command[4096];
	snprintf(command, sizeof command, "gzip -dc '%s'", path);
	FILE *f = popen(command, "r");
	for (int i = 0; f && i < IMAGES; i++) {
		for (int j = 0; j <= PIXELS; j++) {
			int v;
			if (fscanf(f, "%d%*c", &v) != 1) {
				fprintf(stderr, "digits: %s: row %d has no field %d\n", path, i + 1, j + 1);
				exit(1);
			}
			if (j < PIXELS) {
				images[i].pixels[j] = (float)v / 16;
			} else {
				images[i].digit = v;
			}
		}
	}
	if (!f || pclose(f) != 0) {
		fprintf(stderr, "digits: %s cannot be read\n", path);
		exit(1);
	}
	random_t r = seeded(1, 0);
	for (uint32_t i = IMAGES - 1; i > 0; i--) {
		uint32_t j = below(&r, i + 1);
		image swap = images[i];
		images[i] = images[j];
		images[j] = swap;
	}
}

static void forward(const model *m, const image *x, float *h, float *p) {
	for (int i = 0; i < HIDDEN; i++) {
		float sum = m->b1[i];
		for (int j = 0; j < PIXELS; j++) {
			sum += m->w1[i * PIXELS + j] * x->pixels[j];
		}
		h[i] = (float)tanh((double)sum);
	}
	float highest = -INFINITY, total = 0;
	for (int i = 0; i < CLASSES; i++) {
		float sum = m->b2[i];
		for (int j = 0; j < HIDDEN; j++) {
			sum += m->w2[i * HIDDEN + j] * h[j];
		}
		p[i] = sum;
		highest = sum > highest ? sum : highest;
	}
	for (int i = 0; i < CLASSES; i++) {
		p[i] = (float)exp((double)(p[i] - highest));
		total += p[i];
	}
	for (int i = 0; i < CLASSES; i++) {
		p[i] /= total;
	}
}

/* gradient adds the gradient of the cross entropy, times weight, to g. It returns the cross entropy. */
static double gradient(const model *m, const image *x, float weight, model *g) {
	float h[HIDDEN], dh[HIDDEN] = {0}, p[CLASSES];
	forward(m, x, h, p);
	double loss = -log(fmax((double)p[x->digit], 1e-12));
	p[x->digit]--;
	for (int i = 0; i < CLASSES; i++) {
		float d = p[i] * weight;
		g->b2[i] += d;
		for (int j = 0; j < HIDDEN; j++) {
			g->w2[i * HIDDEN + j] += d * h[j];
			dh[j] += d * m->w2[i * HIDDEN + j];
		}
	}
	for (int i = 0; i < HIDDEN; i++) {
		float d = dh[i] * (1 - h[i] * h[i]);
		g->b1[i] += d;
		for (int j = 0; j < PIXELS; j++) {
			g->w1[i * PIXELS + j] += d * x->pixels[j];
		}
	}
	return loss;
}

/* sum replaces g by the sum of the gradients of all ranks. All parts are in flight at the same time, so that
 * gohvd can fuse them. */
static void sum(model *g) {
	hvd_handle_t handles[PARAMETERS];
	hvd_tensor_t t[PARAMETERS];
	for (int i = 0; i < PARAMETERS; i++) {
		char name[32];
		float *x = parameter(g, i);
		snprintf(name, sizeof name, "gradient/%s", names[i]);
		t[i] = (hvd_tensor_t){x, x, (uint64_t)sizes[i] * sizeof *x, &sizes[i], 1, 0};
		hvd_op_t op = hvd_op(HVD_ALLREDUCE, HVD_FLOAT32, &t[i]);
		op.name = name;
		op.reduction = HVD_SUM;
		check(hvd_submit(&op, &handles[i]));
	}
	for (int i = 0; i < PARAMETERS; i++) {
		check(hvd_wait(handles[i], -1, NULL));
	}
}

/* total returns the sum of a number of each rank. */
static double total(double x, const char *name) {
	hvd_tensor_t t = {&x, &x, sizeof x, NULL, 0, 0}; /* a scalar */
	hvd_op_t op = hvd_op(HVD_ALLREDUCE, HVD_FLOAT64, &t);
	op.name = name;
	op.reduction = HVD_SUM;
	check(hvd_run(&op, -1, NULL, NULL));
	return x;
}

static double train(model *m, image *images) {
	static model g, velocity;
	int me = hvd_rank(), n = hvd_size(), order[TRAINING];
	random_t r = seeded(1, 2);
	initialize(m, 1 + (uint64_t)me); /* each rank draws other weights, and then all get those of rank 0 */
	for (int i = 0; i < PARAMETERS; i++) {
		float *x = parameter(m, i);
		hvd_tensor_t t = {x, x, (uint64_t)sizes[i] * sizeof *x, &sizes[i], 1, 0};
		hvd_op_t op = hvd_op(HVD_BROADCAST, HVD_FLOAT32, &t);
		op.name = names[i];
		check(hvd_run(&op, -1, NULL, NULL));
	}
	for (int i = 0; i < TRAINING; i++) {
		order[i] = i;
	}
	for (int epoch = 0; epoch < EPOCHS; epoch++) {
		double loss = 0;
		for (uint32_t i = TRAINING - 1; i > 0; i--) {
			uint32_t j = below(&r, i + 1);
			int swap = order[i];
			order[i] = order[j];
			order[j] = swap;
		}
		for (int begin = 0; begin < TRAINING; begin += BATCH) {
			int size = TRAINING - begin < BATCH ? TRAINING - begin : BATCH;
			memset(&g, 0, sizeof g);
			for (int i = me; i < size; i += n) {
				loss += gradient(m, &images[order[begin + i]], 1 / (float)size, &g);
			}
			sum(&g);
			for (int i = 0; i < PARAMETERS; i++) {
				float *w = parameter(m, i), *d = parameter(&g, i), *v = parameter(&velocity, i);
				for (int64_t j = 0; j < sizes[i]; j++) {
					v[j] = momentum * v[j] - rate * d[j];
					w[j] += v[j];
				}
			}
		}
		loss = total(loss, "loss");
		if (me == 0) {
			printf("epoch %d/%d: loss=%.4f\n", epoch + 1, EPOCHS, loss / TRAINING);
		}
	}
	double right = 0;
	for (int i = TRAINING + me; i < IMAGES; i += n) {
		float h[HIDDEN], p[CLASSES];
		int best = 0;
		forward(m, &images[i], h, p);
		for (int j = 1; j < CLASSES; j++) {
			best = p[j] > p[best] ? j : best;
		}
		right += best == images[i].digit;
	}
	return total(right, "right") / (IMAGES - TRAINING);
}

int main(int argc, char **argv) {
	static image images[IMAGES];
	static model m;
	if (argc != 2) {
		fprintf(stderr, "usage: digits optdigits.csv.gz\n");
		return 2;
	}
	load(argv[1], images);
	check(hvd_init(NULL, NULL));
	double accuracy = train(&m, images);
	printf("digits: ranks=%d epochs=%d test_accuracy=%.4f weights_sha256=", hvd_size(), EPOCHS, accuracy);
	fflush(stdout);
	FILE *f = popen("sha256sum", "w");
	if (!f || fwrite(&m, sizeof m, 1, f) != 1 || pclose(f) != 0) {
		fprintf(stderr, "digits: sha256sum failed\n");
		return 1;
	}
	check(hvd_shutdown(NULL, 0, NULL));
	return 0;
}
