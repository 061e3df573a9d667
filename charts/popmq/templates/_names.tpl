{{- define "popmq.name" -}}
{{- if contains "popmq" .Release.Name }}{{ printf "%s-operator" .Release.Name | trunc 50 }}{{ else }}{{ printf "%s-popmq-operator" .Release.Name | trunc 50 }}{{ end }}
{{- end }}

{{- define "popmq.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "popmq.operatorImage" -}}
{{ .Values.operator.image.repository | default (printf "%s-operator" .Values.image.repository) }}:{{ .Values.operator.image.tag | default .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "popmq.labels" -}}
app.kubernetes.io/name: popmq-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: popmq
{{- end }}

{{/* Namespaces whose objects the operator reconciles, without a clusterWide one. */}}
{{- define "popmq.namespaces" -}}
{{- concat (list .Release.Namespace) .Values.operator.watchNamespaces | uniq | join "," -}}
{{- end }}
