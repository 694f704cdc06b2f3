/* fast.c -- the module shmcache._shmfast: calls of one key or one object, without cffi's way in.
 *
 * cffi's way in, by a tuple and a generic conversion of each argument, costs more than most calls of one
 * key do in the core. The calls here take a vector, and addresses as plain ints; a call is otherwise what
 * cffi makes of it, the GIL is given up around it, and what it answers is the status of shmcache.h.
 *
 *   contains(handle, namespace, key, part)                              1, 0 or an error
 *   get(handle, namespace, key, part, *object)                          an object, or a status
 *   alloc(handle, namespace, size, meta, flags, ticket, *object)        an object, or a status
 *   put(handle, namespace, key, part, parent or None, *object)          1, 0 or an error
 *   pin(handle, namespace, key, part, lease_ns), unpin(...), remove(handle, namespace, key)
 *   objects(handle, parts, holds, *object)                              a list of objects
 *   alike(items, names, key_name)                                       False, True, or keys joined
 *   untracked(object)                                                   the object, unknown to the collector
 *
 * An object is of a class below Held, made here without its __init__, of (class, attachment, namespace,
 * layout or None, hold), where a hold is a pair (whatever keeps an owner, its address). To put takes (object,
 * attachment, namespace); UNUSUAL is the answer when it is not of these, or not like most.
 *
 * A key is a bytes, a str or an int of 64 bits; NO_KEY is the answer for anything else, which goes as its
 * bytes, with its type code as one argument more. The callers, `_attachment` and those above it, keep what
 * an address stands for: a handle by the attachment, an owner by its hold.
 *
 * It lies in the same shared object as the module that cffi makes, so the core is there once. Limited API. */
#include "objects.h"

enum { NO_KEY = -1000, UNUSUAL = -1001, BYTES_TYPE = 1, STR_TYPE = 2, INT_TYPE = 3 };

/* ---- arguments ---------------------------------------------------------------------------------- */

struct name { const uint8_t *data; uint32_t len, type; uint8_t raw[9]; };

/* Two's complement, big-endian, in 8 bytes, or in 9 where an unsigned one needs them. */
static int name_of_int(PyObject *o, struct name *k)
{
    int overflow;
    uint64_t v = (uint64_t)PyLong_AsLongLongAndOverflow(o, &overflow);
    if (overflow) {
        if (overflow < 0) return 0;
        v = PyLong_AsUnsignedLongLong(o);
        if (PyErr_Occurred()) { PyErr_Clear(); return 0; }
    }
    k->raw[0] = 0;
    for (int i = 0; i < 8; i++) k->raw[1 + i] = (uint8_t)(v >> (56 - 8 * i));
    k->data = k->raw + !overflow;
    k->len = overflow ? 9 : 8;
    k->type = INT_TYPE;
    return 1;
}

/* 1; 0: of another kind; -1: an exception is set */
static int name_of(PyObject *o, struct name *k)
{
    char *data = NULL;
    Py_ssize_t len = 0;
    if (PyLong_CheckExact(o)) return name_of_int(o, k);
    if (PyBytes_CheckExact(o)) {
        k->type = BYTES_TYPE;
        if (PyBytes_AsStringAndSize(o, &data, &len)) return -1;
    } else if (PyUnicode_CheckExact(o)) {
        k->type = STR_TYPE;
        data = (char *)(uintptr_t)PyUnicode_AsUTF8AndSize(o, &len);
        if (!data) return -1;
    } else {
        return 0;
    }
    if (len > SHMC_KEY_MAX) return 0;
    k->data = (const uint8_t *)data;
    k->len = (uint32_t)len;
    return 1;
}

static int wants(const char *what, Py_ssize_t least, Py_ssize_t most, Py_ssize_t given)
{
    if (least <= given && given <= most) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", what, least, given);
    return 0;
}
#define WANTS(what, n) do { if (!wants(what, n, n, given)) return NULL; } while (0)

/* Numbers that do not fit are found by one look at the end: whoever gets a wrong one is not called. */
static uint64_t unsigned_of(PyObject *o, uint64_t most)
{
    uint64_t v = 0;
    if (PyLong_CheckExact(o)) {
        v = PyLong_AsUnsignedLongLong(o);
    } else {                                /* as cffi: a number of numpy is one, too */
        PyObject *i = PyNumber_Index(o);
        if (i) v = PyLong_AsUnsignedLongLong(i);
        Py_XDECREF(i);
    }
    if (v > most && !PyErr_Occurred()) PyErr_SetString(PyExc_OverflowError, "a number does not fit");
    return v;
}
static uint32_t u32(PyObject *o) { return (uint32_t)unsigned_of(o, UINT32_MAX); }
static uint64_t u64(PyObject *o) { return unsigned_of(o, UINT64_MAX); }
static int32_t i32(PyObject *o)
{
    long v = PyLong_AsLong(o);
    if (v != (int32_t)v && !PyErr_Occurred()) PyErr_SetString(PyExc_OverflowError, "a number does not fit");
    return (int32_t)v;
}
static void *address(PyObject *o) { return PyLong_AsVoidPtr(o); }
/* KEY -- the number of arguments, and the key, which is the third, into `k` */
#define KEY(what, n) struct name k; do {                                          \
        if (!wants(what, n, (n) + 1, given)) return NULL;                         \
        int ok_ = name_of(arg[2], &k);                                            \
        if (ok_ < 0) return NULL;                                                 \
        if (!ok_) return PyLong_FromLong(NO_KEY);                                 \
        if (given > (n)) {                                                        \
            k.type = u32(arg[n]);                                                 \
            if (PyErr_Occurred()) return NULL;                                    \
        }                                                                         \
    } while (0)
#define CALL(rc, expression) do { if (PyErr_Occurred()) return NULL; Py_BEGIN_ALLOW_THREADS rc = (expression); Py_END_ALLOW_THREADS } while (0)

#define FUNCTION(name) static PyObject *name(PyObject *module, PyObject *const *arg, Py_ssize_t given)

/* ---- calls --------------------------------------------------------------------------------------- */

/* The object when the call found one, else the status. Takes the reference. */
static PyObject *object_or(held_object *o, int found, int rc)
{
    if (found) return (PyObject *)o;
    Py_DECREF(o);
    return PyLong_FromLong(rc);
}

FUNCTION(contains)
{
    (void)module;
    KEY("contains", 4);
    shmc *h = address(arg[0]);
    uint32_t ns = u32(arg[1]);
    int32_t part = i32(arg[3]);
    int rc;
    CALL(rc, shmc_contains_one(h, ns, k.data, k.len, k.type, part));
    return PyLong_FromLong(rc);
}

FUNCTION(get)
{
    enum { OBJECT = 4 };
    KEY("get", OBJECT + OBJECT_ARGUMENTS);
    shmc *h = address(arg[0]);
    uint32_t ns = u32(arg[1]), part = u32(arg[3]);
    shmc_owner *owner = owner_of(arg[OBJECT + HOLD]);
    int rc;
    if (PyErr_Occurred()) return NULL;
    part_object *p;
    held_object *o = object_new(module, h, arg + OBJECT, arg[OBJECT + HOLD], &p);
    if (!o) return NULL;
    CALL(rc, shmc_get_one(h, ns, k.data, k.len, k.type, part, &owner, &p->part));
    /* not found: PENDING, for instance, beside a writer. An error may come after it was found: in a damaged
     * segment, where it lies is outside the arena then. */
    return object_or(o, rc >= 0 && p->part.published, rc);
}

FUNCTION(alloc)
{
    enum { OBJECT = 6 };
    WANTS("alloc", OBJECT + OBJECT_ARGUMENTS);
    char *meta;
    Py_ssize_t len;
    if (PyBytes_AsStringAndSize(arg[3], &meta, &len)) return NULL;
    shmc *h = address(arg[0]);
    uint32_t ns = u32(arg[1]), flags = u32(arg[4]);
    uint64_t size = u64(arg[2]);
    uint32_t *ticket = address(arg[5]);
    shmc_owner *owner = owner_of(arg[OBJECT + HOLD]);
    int rc;
    if (PyErr_Occurred()) return NULL;
    part_object *p;
    held_object *o = object_new(module, h, arg + OBJECT, arg[OBJECT + HOLD], &p);
    if (!o) return NULL;
    CALL(rc, shmc_alloc(h, ns, size, (const uint8_t *)meta, (uint32_t)len, 1, flags, &owner, &p->part, ticket));
    return object_or(o, rc == SHMC_OK, rc);
}

/* One object for each pair of holds, of the part at the same place in an array of parts; without a layout,
 * None for a part that was not found. */
FUNCTION(objects)
{
    enum { OBJECT = 3 };
    WANTS("objects", OBJECT + OBJECT_ARGUMENTS - 1);
    shmc *h = address(arg[0]);
    const shmc_part *parts = address(arg[1]);
    PyObject *holds = arg[2];
    if (PyErr_Occurred()) return NULL;
    if (!PyList_Check(holds)) { PyErr_SetString(PyExc_TypeError, "holds are a list"); return NULL; }
    Py_ssize_t n = PyList_Size(holds);
    PyObject *all = PyList_New(n);
    for (Py_ssize_t i = 0; all && i < n; i++) {
        PyObject *one = Py_None;
        if (arg[OBJECT + LAYOUT] != Py_None || parts[i].published) {
            part_object *p;
            one = (PyObject *)object_new(module, h, arg + OBJECT, PyList_GetItem(holds, i), &p);
            if (one) p->part = parts[i];
        } else {
            Py_INCREF(one);
        }
        if (one) PyList_SetItem(all, i, one);
        else Py_CLEAR(all);
    }
    return all;
}

FUNCTION(put)
{
    KEY("put", 8);
    struct name parent;
    shmc_keys before = {.n = 1}, *beside = NULL;
    if (arg[4] != Py_None) {
        int ok = name_of(arg[4], &parent);
        if (ok <= 0) return ok ? NULL : PyLong_FromLong(NO_KEY);
        before.data = parent.data;
        before.klen = parent.len;
        before.ktype = parent.type;
        beside = &before;
    }
    struct state *s = PyModule_GetState(module);
    held_object *o = (held_object *)arg[5];
    shmc *h = address(arg[0]);
    uint32_t ns = u32(arg[1]), part = u32(arg[3]);
    if (PyErr_Occurred()) return NULL;
    if (!PyObject_TypeCheck(arg[5], s->held) || o->attachment != arg[6] || o->namespace != arg[7] || o->more != Py_None ||
        !o->part || Py_TYPE(o->part) != s->part || !o->holds || !PyList_Check(o->holds) || PyList_Size(o->holds) < 1)
        return PyLong_FromLong(UNUSUAL);
    /* The writer's. Both are kept: another thread may release the object, or change it. */
    PyObject *hold = PySequence_GetItem(o->holds, 0);
    shmc_owner *owner = hold ? owner_of(hold) : NULL;
    if (PyErr_Occurred()) { Py_XDECREF(hold); return NULL; }
    part_object *where = (part_object *)o->part;
    Py_INCREF(where);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = shmc_put_one(h, ns, k.data, k.len, k.type, &owner, part, beside);
    Py_END_ALLOW_THREADS
    if (rc == 1) where->part.published = 1;
    Py_DECREF(where);
    Py_DECREF(hold);
    return PyLong_FromLong(rc);
}

FUNCTION(pin)
{
    (void)module;
    KEY("pin", 5);
    shmc *h = address(arg[0]);
    uint32_t ns = u32(arg[1]);
    int32_t part = i32(arg[3]);
    uint64_t lease = u64(arg[4]);
    int rc;
    CALL(rc, shmc_pin_one(h, ns, k.data, k.len, k.type, part, lease));
    return PyLong_FromLong(rc);
}

static PyObject *by_key(const char *what, PyObject *const *arg, Py_ssize_t given, int (*call)(shmc *, uint32_t, const uint8_t *, uint32_t, uint32_t))
{
    KEY(what, 3);
    shmc *h = address(arg[0]);
    uint32_t ns = u32(arg[1]);
    int rc;
    CALL(rc, call(h, ns, k.data, k.len, k.type));
    return PyLong_FromLong(rc);
}

FUNCTION(unpin)
{
    (void)module;
    return by_key("unpin", arg, given, shmc_unpin_one);
}

FUNCTION(drop)
{
    (void)module;
    return by_key("remove", arg, given, shmc_remove_one);
}

/* Whether all items of a list are of one type and have equal attributes of these names. Where so, and their
 * attribute `key_name` is an int of 64 bits, those ints as `pack` joins them: most of what a call for a
 * thousand of LMCache's keys takes is to look at them. */
FUNCTION(alike)
{
    (void)module;
    WANTS("alike", 3);
    if (!PyList_Check(arg[0]) || !PyTuple_Check(arg[1])) { PyErr_SetString(PyExc_TypeError, "a list of items and a tuple of names"); return NULL; }
    Py_ssize_t n = PyList_Size(arg[0]), names = PyTuple_Size(arg[1]);
    PyObject *first[8] = {NULL}, *joined = NULL, *out = NULL;
    if (!n || names > 8) Py_RETURN_FALSE;
    uint8_t *at = NULL;
    PyObject *head = PySequence_GetItem(arg[0], 0);
    if (!head) return NULL;
    int same = 1;
    for (Py_ssize_t j = 0; same && j < names; j++)
        if (!(first[j] = PyObject_GetAttr(head, PyTuple_GetItem(arg[1], j)))) goto out;
    joined = PyBytes_FromStringAndSize(NULL, 8 * n);
    if (!joined) goto out;
    at = (uint8_t *)PyBytes_AsString(joined);
    for (Py_ssize_t i = 0; same > 0 && i < n; i++) {
        PyObject *item = PySequence_GetItem(arg[0], i);     /* kept: looking at attributes may run Python */
        if (!item) goto out;
        same = Py_TYPE(item) == Py_TYPE(head);
        for (Py_ssize_t j = 0; same > 0 && j < names; j++) {
            PyObject *value = PyObject_GetAttr(item, PyTuple_GetItem(arg[1], j));
            same = !value ? -1 : value == first[j] ? 1 : PyObject_RichCompareBool(value, first[j], Py_EQ);
            Py_XDECREF(value);
        }
        if (same > 0 && at) {
            PyObject *key = PyObject_GetAttr(item, arg[2]);
            struct name k;
            if (!key) same = -1;
            else if (!PyLong_CheckExact(key) || name_of_int(key, &k) <= 0 || k.len != 8) at = NULL;
            else { memcpy(at, k.data, 8); at += 8; }
            Py_XDECREF(key);
        }
        Py_DECREF(item);
    }
    if (same >= 0) {
        out = !same ? Py_False : at ? joined : Py_True;
        Py_INCREF(out);
    }
out:
    for (Py_ssize_t j = 0; j < names; j++) Py_XDECREF(first[j]);
    Py_XDECREF(head);
    Py_XDECREF(joined);
    return out;
}

FUNCTION(untracked)
{
    (void)module;
    WANTS("untracked", 1);
    if (!PyType_HasFeature(Py_TYPE(arg[0]), Py_TPFLAGS_HAVE_GC)) { PyErr_SetString(PyExc_TypeError, "an object that the collector tracks"); return NULL; }
    PyObject_GC_UnTrack(arg[0]);
    Py_INCREF(arg[0]);
    return arg[0];
}

/* ---- the module ---------------------------------------------------------------------------------- */

#define METHOD(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    METHOD("contains", contains), METHOD("get", get), METHOD("alloc", alloc), METHOD("put", put), METHOD("pin", pin),
    METHOD("unpin", unpin), METHOD("remove", drop), METHOD("objects", objects),
    METHOD("alike", alike), METHOD("untracked", untracked), {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    if (objects_ready(module)) return -1;
    return PyModule_AddIntConstant(module, "NO_KEY", NO_KEY) || PyModule_AddIntConstant(module, "UNUSUAL", UNUSUAL) ? -1 : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct state *s = PyModule_GetState(module);
    Py_VISIT(s->part);
    Py_VISIT(s->held);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct state *s = PyModule_GetState(module);
    Py_CLEAR(s->part);
    Py_CLEAR(s->held);
    return 0;
}

static void module_free(void *module) { module_clear(module); }     /* no collection has to come first */

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "shmcache._shmfast", NULL, sizeof(struct state), methods, module_slots, module_traverse, module_clear, module_free,
};

PyMODINIT_FUNC PyInit__shmfast(void) { return PyModuleDef_Init(&definition); }
